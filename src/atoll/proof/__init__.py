"""What an export was made from, written down beside it: provenance.json."""
