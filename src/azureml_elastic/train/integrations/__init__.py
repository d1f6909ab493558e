"""Training stacks that use the session of a worker without the script's help: one folder or module a stack.

An integration attaches itself when the script imports its stack, see
:mod:`~azureml_elastic.forks.stack_imports`. It changes nothing where the process is not a worker of a run.
"""
