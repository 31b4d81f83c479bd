//! A bounded ZMTP 3 client: SUB and DEALER sockets with the NULL mechanism.
