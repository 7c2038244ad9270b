"""The building blocks of techniques, one package for each subject."""
