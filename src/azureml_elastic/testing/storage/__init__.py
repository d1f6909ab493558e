"""The storage account of the local workspace."""
