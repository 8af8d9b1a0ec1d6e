"""Compare answers in LaTeX in the same way as published graders. Texts are compared in this process, and algebra is
done in a helper process, because algebra may take forever."""
