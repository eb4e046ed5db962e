"""The operations of a Buffer, one file each: checks, allocation, engine calls, events."""
