"""The configuration: YAML that Hydra composes, and the few lines that turn it into settings."""
