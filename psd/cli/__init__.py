"""The processes: psd-server, psd-run, psdctl. Read flags, build configurations, print; decide nothing about training."""
