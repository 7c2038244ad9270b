"""The answers: same, as good, legible, honest, fast; and the proof that holds them."""
