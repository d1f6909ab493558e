"""Jobs as YAML files."""
