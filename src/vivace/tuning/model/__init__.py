"""What techniques do, learnt from few trials: priors, a regression, and what a recipe may gain."""
