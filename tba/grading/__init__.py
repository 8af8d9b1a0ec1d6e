"""Compare answers in LaTeX as published graders do. Text is compared in this process, and algebra in a helper process,
because algebra may take forever."""
