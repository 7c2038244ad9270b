"""What commands answer: one form, and a writer each for the terminal, Markdown, JSON and HTML."""
