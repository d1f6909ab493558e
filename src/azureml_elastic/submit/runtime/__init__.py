"""The files that are shipped with a job to its nodes: this library, and the script that starts it there."""
