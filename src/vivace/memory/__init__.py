"""What a model takes under a recipe, predicted from shapes alone."""
