"""`Ragged`: its schema, the parsing of rows, and the storage."""
