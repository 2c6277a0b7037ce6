"""The cluster: its nodes, versions, jobs, and a Ray on this machine."""
