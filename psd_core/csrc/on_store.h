/* Stores that tests stop at: before each store of a protocol that must survive a kill, the store's owner says which it is. */
#ifndef PSD_ON_STORE_H
#define PSD_ON_STORE_H

#define PSD_BEFORE(t, what)                        \
    do {                                           \
        if (__builtin_expect(!!(t)->on_store, 0))  \
            (t)->on_store((t)->context, what);     \
    } while (0)

#endif
