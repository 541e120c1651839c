import sys, time, torch, gc
sys.path[:0]=['src','.']
from benchmarks.longest import EIGHT_BILLION, build, say
import retape
from retape.api import fit_using
from retape.torch.planning.step_trials import StepTrials
from retape.torch.planning import plan_search
dev=torch.device('cuda',0); G=2**30
m=build(EIGHT_BILLION,32768,dev,0)
states=[torch.empty(p.numel()*2,dtype=p.dtype,device=dev) for p in m.parameters()]
ids=torch.randint(0,128256,(6,8192),device=dev); batch=dict(input_ids=ids,labels=ids)
def mem(): return f"alloc {torch.cuda.memory_allocated()/G:.2f} max {torch.cuda.max_memory_allocated()/G:.2f} reserved {torch.cuda.memory_reserved()/G:.2f}"
say('before', mem())
class T(StepTrials):
    def run_step(self,*a):
        say('   step begins', mem()); t=time.time()
        try: super().run_step(*a)
        except torch.OutOfMemoryError as e:
            say('   OOM', str(e)[:200]); raise
        finally:
            torch.cuda.synchronize(); say(f'   step {time.time()-t:.1f}', mem())
    def profiled(self,*a,**k):
        p=super().profiled(*a,**k)
        say('profiled', 'fixed', {str(d):b/G for d,b in self.fixed_bytes.items()}, 'start', self.start_bytes(self.devices[0])/G, 'peak', p.step.peak/G, 'loss', p.step.loss/G, 'long', self.is_long)
        for s in (-1,0,1,31):
            if s in p.step.regions:
                r=p.step.regions[s]; say(s,{k:round(getattr(r,k)/G,3) for k in r.__slots__})
        return p
def tell(what): say('tell', what, mem())
orig=plan_search.build_chain
def bc(*a,**k):
    c=orig(*a,**k)
    say('chain fixed', c.chain.fixed_bytes/G, 'slack', c.slack_bytes/G)
    for st in (c.chain.stages[0],c.chain.stages[1],c.chain.stages[5],c.chain.stages[-2],c.chain.stages[-1]): say(st.name, {k:round(getattr(st,k)/G,3) for k in ('state_bytes','tape_bytes','forward_transient_bytes','backward_transient_bytes','rerun_transient_bytes','untaped_transient_bytes','gradient_bytes')}, st.pinned, [ (o.label, round(o.held_bytes/G,2), round(o.backward_transient_bytes/G,2)) for o in st.options[-2:]])
    return c
plan_search.build_chain=bc
import retape.api as api
try:
    import contextlib
    @contextlib.contextmanager
    def bar(p): yield tell
    api._progress_bar=bar
    f=fit_using(T,m,batch,budget="130GiB",progress=False)
    say(repr(f))
except Exception as e: say(type(e).__name__, str(e)[:300])
