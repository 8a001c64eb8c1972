"""The commands psd-server, psd-run and psdctl. They read flags, build configurations and print; they decide nothing about
training.

    server.py, run.py, psdctl.py, agent.py   the entry points, one for each command; run_options.py  psd-run's flags
    ray/, kubernetes/, hosts/                where a job may run
    processes/ a job's processes on one machine
    job/ what belongs to a job, and what to do next
    ctl/                                     the commands of psdctl
    words/                                   arguments, logs, text for terminals

Entry points import from the folders, and no folder imports an entry point.
"""
