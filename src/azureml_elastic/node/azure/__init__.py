"""Azure services other than the table: clouds, credentials, HTTP requests and the workspace."""
