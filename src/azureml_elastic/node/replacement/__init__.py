"""Lost nodes are replaced, and nodes that nobody needs any more are not waited for."""
