"""Save and resume a run; import and export published weights."""
