/* Template over `real`: gradient descent whose Nesterov momentum moves on once in several updates.
 *
 * Source: Liu et al. 2024 (arXiv:2401.09135) alg. 3, operation by operation. Differences of learners that come one by one are
 * summed; each moves the parameters as a plain gradient, and the last of `every` moves the momentum, too, by their mean. With
 * every = 1 and activation = 0 it is Nesterov's momentum as in torch.optim.SGD.
 */
#define DELAYED_NESTEROV_STEPS_ALIKE_FROM UINT64_MAX
typedef struct { real lr, momentum, look, share, sign; int is_turn; } FN(delayed_nesterov);

PSD_PREPARE(delayed_nesterov)
{
    const uint64_t every = h->every < 1 ? 1 : h->every > 1e9 ? 1000000000 : (uint64_t)h->every;
    const double c = h->activation;
    k->is_turn = step % every == 0;
    k->lr = h->lr;
    k->momentum = h->momentum;
    k->look = (k->is_turn ? 1 - c * every + c : c) * h->momentum;
    k->share = 1 / (double)every;
    k->sign = h->is.maximize ? -1 : 1;
}

PSD_LOOP(delayed_nesterov, int is_turn)
{
    const FN(delayed_nesterov) c = *k;
    const real *const m_in = slots_in[SLOT_DELAYED_NESTEROV_MOMENTUM], *const d_in = slots_in[SLOT_DELAYED_NESTEROV_WAITING];
    real *const m_out = slots_out[SLOT_DELAYED_NESTEROV_MOMENTUM], *const d_out = slots_out[SLOT_DELAYED_NESTEROV_WAITING];
    PSD_ELEMENTWISE
    for (intptr_t i = 0; i < n; i++) {
        const real p = p_in[i], g = c.sign * g_in[i], d = d_in[i] + g;
        const real m = is_turn ? c.momentum * m_in[i] + c.share * d : m_in[i];
        m_out[i] = m;
        d_out[i] = is_turn ? 0 : d;
        p_out[i] = p - c.lr * (c.look * m + c.share * g);
    }
}

PSD_TILE(delayed_nesterov)
{
    if (k->is_turn)
        FN(delayed_nesterov_loop)(PSD_PASSED, 1);
    else
        FN(delayed_nesterov_loop)(PSD_PASSED, 0);
}
