"""Comparing answers in LaTeX as published graders do: text at once, and algebra, which may take for ever, elsewhere."""
