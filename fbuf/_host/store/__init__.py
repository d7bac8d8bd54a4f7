"""The host store: slots, tickets, reading ahead, saving."""
