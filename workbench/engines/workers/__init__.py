"""Processes, hosts and replicas that engines are placed in, without Ray."""
