"""Horovod: every node runs workers of the program, which Horovod's elastic mode keeps over the rounds."""
