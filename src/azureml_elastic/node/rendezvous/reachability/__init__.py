"""Which nodes reach each other: probes, records of unreachable pairs, and the majority's view of rank 0's node."""
