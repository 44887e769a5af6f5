"""Pages that can be read on their own: what the reports of several commands look like."""
