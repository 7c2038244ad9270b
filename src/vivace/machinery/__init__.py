"""What techniques are built from: one room for each subject."""
