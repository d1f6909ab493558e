"""Reading elastic jobs from YAML files, and writing them as the standard YAML of Azure ML."""
