"""What a graph holds and what each step costs: measured, as a table, a page, a trace."""
