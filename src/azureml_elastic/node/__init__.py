"""What runs on each node of an elastic job: ``python -m azureml_elastic.node``."""
