"""UNITS: one Prefect task a stage; joins core and infra."""
