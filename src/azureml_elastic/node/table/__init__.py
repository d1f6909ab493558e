"""The table of a run: its only shared state, rows behind one protocol with two backends."""

from azureml_elastic.node.table.opening import as_developer, open_table
from azureml_elastic.node.table.protocol import Row, Table

__all__ = ["Row", "Table", "as_developer", "open_table"]
