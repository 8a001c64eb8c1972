"""The contract of servers and clients: messages, frames, layout, job spec, errors, configuration. Holds no state."""
