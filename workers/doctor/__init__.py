"""`python -m workers.doctor`: facts of the machine, findings, a trial of the links, the report."""
