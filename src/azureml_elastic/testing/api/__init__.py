"""The HTTP interface of Azure ML that the local workspace implements."""
