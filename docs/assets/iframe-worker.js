// Browsers refuse to start a worker for a page opened from the disk. The theme's search then runs in a hidden frame
// instead, which has the same interface. The theme would fetch such a script from the network; this one is ours.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script");
        script.src = address;
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${address}`));
        frame.contentDocument.body.append(script);
      });
    }

    async postMessage(data) {
      await this.loaded; // messages sent before keep their order
      this.scope.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
