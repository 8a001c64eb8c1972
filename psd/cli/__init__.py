"""The processes: psd-server, psd-run, psdctl. Read flags, build configurations, print; decide nothing about training.

    server.py, run.py, psdctl.py, agent.py   the doors, a command each; run_options.py  psd-run's flags
    ray/, kubernetes/, hosts/                where a job may run
    processes/                               its processes on one machine
    job/                                     what belongs to it, and what to do next
    ctl/                                     the commands of psdctl
    words/                                   arguments, logs, text for terminals

Doors import rooms, and no room imports a door.
"""
