"""What people look at: explain, lint, verify, tune."""
