"""What diffusers' samplers do: the calls of a step, the step counts and predictions that they take."""
