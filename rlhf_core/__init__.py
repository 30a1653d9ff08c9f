"""WHAT is computed: configuration, maths, rollouts, rewards, engines, actors. Knows no Prefect and no S3 client."""
