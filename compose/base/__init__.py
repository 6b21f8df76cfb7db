"""What every room may use: checked fields, files that stay within a folder, lazy names, one file for
what differs between versions of torch. It knows nothing of training, and imports no other room."""
