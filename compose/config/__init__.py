"""The tables of train.toml, how they are read, the rules between them, and the job of a run."""
