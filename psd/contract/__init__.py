"""What servers and clients agree on: messages, frames, layout, job spec, errors, configuration. Holds no state."""
