"""Keeps the cluster agreed on who is alive and what the plan is: agents, one of them the coordinator, and members."""
