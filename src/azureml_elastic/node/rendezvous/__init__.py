"""How the nodes of a run agree on who trains, in which order, and where: see ``docs/internals/rendezvous.md``."""
