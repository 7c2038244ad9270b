"""What a technique is: its stage, its knobs, its target, its effect, the traits it provides and excludes."""
