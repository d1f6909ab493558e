"""The environment variables of each kind of process, as typed properties of one frozen object; read nowhere else."""
