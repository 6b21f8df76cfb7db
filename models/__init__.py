"""One folder per model: model.py (the module), plan.py (its parallelization), hf.py (weight names)."""
