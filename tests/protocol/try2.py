import sys,time,logging,gc
sys.path.insert(0,'tests/protocol')
from setting import *
import green, worker_process, shard_process
from world import *
from explorer import *
from trace import story
import argparse
logging.disable(logging.CRITICAL)
ap=argparse.ArgumentParser()
ap.add_argument('--mode',default='sync'); ap.add_argument('--agg',default='fast'); ap.add_argument('--quorum',type=int,default=0)
ap.add_argument('--budget',type=int,default=1); ap.add_argument('--steps',type=int,default=2)
ap.add_argument('--programs',default='push_pull,push_pull'); ap.add_argument('--faults',default='')
ap.add_argument('--max',type=int,default=5); ap.add_argument('--schedule',action='store_true'); ap.add_argument('--seconds',type=float,default=0)
ap.add_argument('--checkpoint',action='store_true'); ap.add_argument('--clip',action='store_true'); ap.add_argument('--depth',action='store_true'); ap.add_argument('--profile',action='store_true'); ap.add_argument('--show',type=int,default=1)
a=ap.parse_args()
setting=Setting('x',consistency=a.mode, aggregation=a.agg, quorum=a.quorum, budget=a.budget, steps=a.steps, programs=tuple(a.programs.split(',')), has_schedule=a.schedule)
if a.checkpoint: setting=setting.but(has_checkpoint=True)
if a.clip: setting=setting.but(job={'clip_norm':1e12})
if a.faults: setting=setting.but(faults=frozenset(a.faults.split(',')))
def main():
  with green.green(*worker_process.stand_ins(), *shard_process.stand_ins()):
    w=World(setting)
    e=Explorer(w,report=lambda t: print(t,flush=True),findings_max=a.max,seconds=a.seconds,is_shortest=not a.depth)
    e.run()
    print(e.states,e.steps,e.depth,len(e.findings), 'complete' if e.is_complete else 'cut off')
    for f in e.findings:
        print('FINDING', f.wrong)
    for f in e.findings[:a.show]:
        print('--', f.wrong)
        for line in story(w, f.actions, from_step=13): print(line)
    w.close()
if a.profile:
    import cProfile; cProfile.run('main()','/tmp/prof'); import pstats; pstats.Stats('/tmp/prof').sort_stats('cumtime').print_stats(45)
else: main()
