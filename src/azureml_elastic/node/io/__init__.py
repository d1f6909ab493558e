"""What a node does with files, the table and the network; nothing is decided here."""
