"""What a job's command starts: its Python program, the launcher in front of it, and the text of its scripts."""
