"""Who may come in and how much each may have: keys, shares and limits of servers and gateways."""
